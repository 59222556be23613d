"""The families, one row each: classes, paper, and how a model of the family starts from a trained base.

To add a family, write its two files in `models/`, and add its row to `FAMILIES`. Everything else reads the row: the
Auto classes, warm start, recipes, model cards, sharing.
"""

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from .models.configuration_base import DeepWideConfig
from .models.configuration_depthwise_lstm import DepthwiseLSTMConfig
from .models.configuration_latent_depth import LatentDepthConfig
from .models.configuration_mat import MATConfig
from .models.configuration_mat_roberta import MATRobertaConfig
from .models.configuration_multipath_transformer import MultiPathConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.modeling_base import DeepWideForConditionalGeneration, DeepWideModel
from .models.modeling_depthwise_lstm import DepthwiseLSTMForConditionalGeneration, DepthwiseLSTMModel
from .models.modeling_latent_depth import LatentDepthForConditionalGeneration, LatentDepthModel
from .models.modeling_latent_depth_mlm import LatentDepthForMaskedLM
from .models.modeling_mat import MATForConditionalGeneration, MATModel
from .models.modeling_mat_roberta import (
    MATRobertaForMaskedLM,
    MATRobertaForSequenceClassification,
    MATRobertaModel,
    MATRobertaPreTrainedModel,
)
from .models.modeling_multipath_transformer import MultiPathForConditionalGeneration, MultiPathModel
from .models.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from .models.pretrained_model import DeepWidePreTrainedModel


def copies_of_branches(config: DeepWideConfig, stack: str, sublayer: str) -> int:
    """The number of branches of a sub-layer, `"attn"` or `"feed_forward"`, in the stack `"encoder"` or `"decoder"`."""
    return config.attention_branches if sublayer == "attn" else config.ffn_branches


def takes_all(key: str, base: VanillaTransformerConfig) -> bool:
    """Return True: every tensor of the base is used."""
    return True


def loses_nothing(base: VanillaTransformerConfig, config: DeepWideConfig) -> list[str]:
    """Return no reasons: the base's function is kept."""
    return []


class Start(NamedTuple):
    """How a family starts from a base in vanilla form; the default copies all and keeps the base's function."""

    defaults: Mapping[str, Any] = MappingProxyType({})  # config fields that differ from those of a new model
    free: tuple[str, ...] = ()  # shared config fields that may differ from the base's: they describe new modules
    neutral: Mapping[str, tuple] = MappingProxyType({})  # other values of shared fields that keep the base's function
    copies: Callable[[DeepWideConfig, str, str], int] = copies_of_branches  # branches made of a plain sub-layer
    takes: Callable[[str, VanillaTransformerConfig], bool] = takes_all  # whether a tensor of the base is used
    losses: Callable[[VanillaTransformerConfig, DeepWideConfig], list[str]] = loses_nothing  # why the function changes


class Family(NamedTuple):
    """The row of a family that translates."""

    config: type[DeepWideConfig]
    model: type[DeepWideModel]
    lm: type[DeepWideForConditionalGeneration]
    masked_lm: type[DeepWidePreTrainedModel] | None = None
    paper: tuple[str, str] | None = None  # title, arXiv number
    start: Start = Start()
    is_base: bool = False  # a vanilla config can describe its models, so that other models can start from them
    has_posteriors: bool = False  # the config has `num_posteriors` and `posterior_names`: a language selects its own

    @property
    def auto_classes(self) -> dict[str, type]:
        """The family's classes under the names of the Auto classes that load them."""
        classes = {"AutoConfig": self.config, "AutoModel": self.model, "AutoModelForSeq2SeqLM": self.lm}
        return classes if self.masked_lm is None else classes | {"AutoModelForMaskedLM": self.masked_lm}

    @property
    def tasks(self) -> dict[type, str]:
        """The family's classes that serve a task, with the pipeline's name of the task; the usual one is the first."""
        tasks: dict[type, str] = {self.lm: "translation"}
        return tasks if self.masked_lm is None else tasks | {self.masked_lm: "fill-mask"}


class EncoderFamily(NamedTuple):
    """The row of a family of encoders, which understand language and do not translate."""

    config: type[DeepWideConfig]
    model: type[MATRobertaPreTrainedModel]
    masked_lm: type[MATRobertaPreTrainedModel]
    classifier: type[MATRobertaPreTrainedModel]
    paper: tuple[str, str]

    @property
    def auto_classes(self) -> dict[str, type]:
        """The family's classes under the names of the Auto classes that load them."""
        return {
            "AutoConfig": self.config,
            "AutoModel": self.model,
            "AutoModelForMaskedLM": self.masked_lm,
            "AutoModelForSequenceClassification": self.classifier,
        }

    @property
    def tasks(self) -> dict[type, str]:
        """The family's classes that serve a task, with the pipeline's name of the task; the usual one is the first."""
        return {self.masked_lm: "fill-mask", self.classifier: "text-classification"}


def copies_of_paths(config: MultiPathConfig, stack: str, sublayer: str) -> int:
    """The number of paths in the encoder, and of branches in the decoder."""
    return config.encoder_paths if stack == "encoder" else copies_of_branches(config, stack, sublayer)


def losses_of_paths(base: VanillaTransformerConfig, config: MultiPathConfig) -> list[str]:
    """Return the reason if the paths have norms, or if their weights do not add up to 1."""
    total = config.initial_path_weight * config.path_features
    if not config.path_norm and math.isclose(total, 1):
        return []
    joined_by = "norms that the base does not have" if config.path_norm else f"weights that add up to {total:.3g}"
    return [
        f"its {config.encoder_paths} paths are joined by {joined_by}; path_norm=False without a path_weight_init "
        "preserves it"
    ]


def losses_of_latent_depth(base: VanillaTransformerConfig, config: LatentDepthConfig) -> list[str]:
    """Return the reason if norms are left out, or if the selection scales the copied layers or leaves them out."""
    if not config.layer_norms:
        return ["`layer_norms=False` leaves out the norms with which its layers were trained; train it before use"]
    if config.inference_selection != "hard":
        return [
            f"`inference_selection` {config.inference_selection!r} weighs each layer by less than 1, as training does "
            "with these samples; train it before use. Hard selection (`soft_selection_steps=0`) preserves it"
        ]
    if config.layer_selection_init < 0:
        return [
            f"`layer_selection_init` {config.layer_selection_init} selects no layer at first; 0 or more preserves it"
        ]
    return []


REPLACED_BY_LSTM = re.compile(r"\.feed_forward\.|\.final_layer_norm\.")
NORM = re.compile(r"(_attn_layer_norm|model\.(encoder|decoder)\.layer_norm)\.")


def lstm_takes(key: str, base: VanillaTransformerConfig) -> bool:
    """Return whether a tensor is used: no feed-forward networks and their norms, and no norms of a post-norm base."""
    return not REPLACED_BY_LSTM.search(key) and (base.normalize_before or not NORM.search(key))


def losses_of_lstm(base: VanillaTransformerConfig, config: DepthwiseLSTMConfig) -> list[str]:
    """Return the reason: the LSTM, which no base has."""
    return ["its embeddings and attentions are copied, and the LSTM that joins them is new; train it before use"]


def losses_of_vanilla(base: VanillaTransformerConfig, config: VanillaTransformerConfig) -> list[str]:
    """Return the reason if a solver evaluates each copied layer twice."""
    if config.encoder_solver == base.encoder_solver:
        return []
    return [
        f"`encoder_solver` {config.encoder_solver!r} evaluates each encoder layer twice, and its gate is new; train "
        "it before use"
    ]


FAMILIES = {
    family.config.model_type: family
    for family in (
        Family(
            VanillaTransformerConfig,
            VanillaTransformerModel,
            VanillaTransformerForConditionalGeneration,
            paper=("Vaswani et al. 2017, Attention Is All You Need", "1706.03762"),
            start=Start(
                free=(
                    *("encoder_solver", "aggregation_dilation", "aggregation_period"),
                    *("attention_block", "residual_streams", "dynamic_streams", "sinkhorn_iterations"),
                ),
                neutral=MappingProxyType(
                    {"layer_aggregation": ("denseformer",), "residual": ("attention", "hyper", "mhc")}
                ),
                losses=losses_of_vanilla,
            ),
            is_base=True,
            has_posteriors=True,
        ),
        Family(
            MATConfig,
            MATModel,
            MATForConditionalGeneration,
            paper=("Fan et al. 2020, Multi-branch Attentive Transformer", "2006.10270"),
            is_base=True,
        ),
        Family(
            MultiPathConfig,
            MultiPathModel,
            MultiPathForConditionalGeneration,
            paper=("Lin et al. 2023, Multi-Path Transformer is Better", "2305.05948"),
            start=Start(copies=copies_of_paths, losses=losses_of_paths),
        ),
        Family(
            LatentDepthConfig,
            LatentDepthModel,
            LatentDepthForConditionalGeneration,
            LatentDepthForMaskedLM,
            paper=("Li et al. 2020, Deep Transformers with Latent Depth", "2009.13102"),
            start=Start(
                defaults={"layer_selection_init": 2.0},  # a base uses all its layers: q = 0.88
                losses=losses_of_latent_depth,
            ),
            has_posteriors=True,
        ),
        Family(
            DepthwiseLSTMConfig,
            DepthwiseLSTMModel,
            DepthwiseLSTMForConditionalGeneration,
            paper=("Xu et al. 2024, Rewiring the Transformer with Depth-Wise LSTMs", "2007.06257"),
            start=Start(
                defaults={"normalize_before": True, "activation_function": "gelu"},
                free=("normalize_before", "encoder_ffn_dim", "decoder_ffn_dim", "activation_function"),
                takes=lstm_takes,
                losses=losses_of_lstm,
            ),
        ),
    )
}

ENCODERS = {
    "mat_roberta": EncoderFamily(
        MATRobertaConfig,
        MATRobertaModel,
        MATRobertaForMaskedLM,
        MATRobertaForSequenceClassification,
        paper=("Fan et al. 2020, Multi-branch Attentive Transformer", "2006.10270"),
    )
}


def all_families() -> dict[str, Family | EncoderFamily]:
    """The rows of all families by model type: those that translate and the encoders."""
    return {**FAMILIES, **ENCODERS}


def family_of(config_class: type[PreTrainedConfig]) -> Family | None:
    """The row of a config class, or of a class that it extends; None if it belongs to no family that translates."""
    model_types = (getattr(cls, "model_type", None) for cls in config_class.__mro__)
    return next((FAMILIES[model_type] for model_type in model_types if model_type in FAMILIES), None)


def count_posteriors(config: PreTrainedConfig) -> int:
    """The number of posteriors from which the language of a sentence selects one; 1 in a family without posteriors."""
    family = family_of(type(config))
    return config.num_posteriors if family is not None and family.has_posteriors else 1
