"""The cases, one in each row: a family, and the fields in which its tiny config differs from `TINY`.

The tests of Transformers expect as many decoder layers as encoder layers, and as many heads.
"""

from itertools import product
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_deepwide.families import ENCODERS, FAMILIES, Family

TINY = {
    "vocab_size": 99,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 100,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    # The tests multiply weights by 5 and compare attention functions to 1e-5: Xavier's weights are too large for that.
    "init_std": 0.02,
}
# By default a model runs sdpa, and tests that need attention weights switch to eager.
EAGER = {"attn_implementation": "eager"}
PRE_NORM = {"normalize_before": True}
JOINED = (
    {"residual": "attention"},
    {"residual": "attention", "attention_block": 1},
    {"residual": "hyper"},
    {"residual": "hyper", "dynamic_streams": False},
    {"residual": "mhc"},
)
RNN = {"cell": "rnn", "lstm_hidden": "single", "cross_query": "residual"}
BIASED = {"lstm_bias": True, "attn_input_norm": False, "final_layer_norm": True, "attention_branches": 2}
GLOBAL = {"share_gates": "global", "share_hidden": "global"}


class Case(NamedTuple):
    """A family with a tiny config."""

    name: str
    family: Family
    fields: dict[str, Any]

    @property
    def model_classes(self) -> tuple[type[PreTrainedModel], type[PreTrainedModel]]:
        """The bare model and the model that translates."""
        return self.family.model, self.family.lm

    @property
    def refuses_flex_attention(self) -> bool:
        """Whether the model reads masks, or adds to attention scores. Flex attention allows neither."""
        form = self.fields.get("layer_form")
        return "max_relative_position" in self.fields or form in ("dynamic_convolution", "evolved", "luna")

    def config(self, **changes: Any) -> Any:
        """A tiny config."""
        return self.family.config(**{**TINY, **self.fields, **changes})


def _rows(model_type: str, *variants: dict[str, Any]) -> list[Case]:
    """A family with its default fields, and its variants. The name of a case lists the fields that differ."""
    cases = []
    for fields in ({}, *variants):
        values = [f"{name}_{value}" for name, value in fields.items()]
        cases.append(Case("_".join([model_type, *values]), FAMILIES[model_type], fields))
    return cases


CASES = [
    *_rows(
        "vanilla_transformer",
        EAGER,
        PRE_NORM,
        {"residual": "rezero"},
        {"max_relative_position": 2},
        {"max_relative_position": 2, "attention_branches": 3, **PRE_NORM},
        *({"residual": residual, "attention_branches": n} for residual, n in product(("deepnorm", "b2t"), (1, 3))),
        *({**joined, **PRE_NORM, "attention_branches": n} for joined, n in product(JOINED, (1, 3))),
        {"residual": "sdu"},
        {"residual": "sdu", "attention_branches": 3, **PRE_NORM},
        {"layer_aggregation": "dlcl"},
        {"layer_aggregation": "transparent"},
        {"layer_aggregation": "transparent", "attention_branches": 3, **PRE_NORM},
        {"language_aware": True},
        {"layer_form": "dynamic_convolution"},
        {"layer_form": "evolved", **PRE_NORM},
        {"decoder_attention": "merged", "initialization": "depth_scaled"},
        {"decoder_attention": "merged", "attention_branches": 3, **PRE_NORM},
        {"layer_form": "weighted"},
        {"layer_form": "weighted", **PRE_NORM},
        {"layer_form": "luna", "luna_length": 3},
        {"layer_form": "luna", "luna_length": 3, "luna_tie_kv": True, **PRE_NORM},
        *({"layer_aggregation": how} for how in ("iterative", "hierarchical", "em_routing")),
        *({"layer_aggregation": "denseformer", "attention_branches": n} for n in (1, 3)),
        *({"encoder_solver": "rk2", "attention_branches": n} for n in (1, 3)),
        {"layer_aggregation": "dlcl", **PRE_NORM},
        {"layer_drop": 0.3, **PRE_NORM},
    ),
    *_rows(
        "mat",
        EAGER,
        PRE_NORM,
        {"attention_branches": 1},
        {"attention_branches": 1, **PRE_NORM},
        {"ffn_branches": 2, "join_ffn": False, "drop_unit": "chunk"},
    ),
    *_rows(
        "multipath_transformer",
        EAGER,
        *({"encoder_paths": paths, "more_features": more} for paths, more in product((1, 2, 4), (False, True))),
        {"encoder_paths": 4, "path_norm": False, "normalize_before": False},
    ),
    *_rows(
        "latent_depth",
        EAGER,
        *(
            {"latent_encoder": both, "inference_selection": how}
            for both, how in product((True, False), ("hard", "soft"))
        ),
        {"layer_norms": False},
    ),
    *_rows(
        "depthwise_lstm",
        EAGER,
        *({"decoder_merge": merge} for merge in ("add", "concat", "two_lstms")),
        *(
            {"share_gates": gates, "share_hidden": hidden}
            for gates, hidden in product(("none", "stack", "global"), repeat=2)
        ),
        {"decoder_merge": "two_lstms", **GLOBAL},
        RNN,
        BIASED,
    ),
]

# Encoders: models without a decoder.
ENCODER_CASES = {
    "mat_roberta": {},
    "mat_roberta_eager": EAGER,
    "mat_roberta_one_branch": {"attention_branches": 1, "drop_branch": 0.0},
}

# The tests look up the class's name to decide whether a batch needs labels. Without an entry they build no labels.
for _model_type, _family in FAMILIES.items():
    modeling_auto.MODEL_MAPPING_NAMES.setdefault(_model_type, _family.model.__name__)
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.setdefault(_model_type, _family.lm.__name__)
for _model_type, _encoder in ENCODERS.items():
    modeling_auto.MODEL_MAPPING_NAMES.setdefault(_model_type, _encoder.model.__name__)
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.setdefault(_model_type, _encoder.masked_lm.__name__)
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.setdefault(_model_type, _encoder.classifier.__name__)
