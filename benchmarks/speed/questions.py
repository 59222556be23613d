"""The questions about speed: for each question its systems, the system to compare them with, and the tasks."""

from dataclasses import dataclass

from tasks import Decoding, Training
from transformers import MarianConfig, PreTrainedConfig

from hf_deepwide import (
    DepthwiseLSTMConfig,
    LatentDepthConfig,
    MATConfig,
    MultiPathConfig,
    VanillaTransformerConfig,
)

SPECIAL = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
DECODING = (Decoding(1, 1), Decoding(1, 5), Decoding(32, 1), Decoding(32, 5))


def size(layers: int, width: int, heads: int, inner: int, **more: object) -> dict:
    """Config fields for two stacks of equal size. Marian and our families use the same names for these fields."""
    fields = {
        "vocab_size": 8000,
        "d_model": width,
        "activation_function": "relu",
        "scale_embedding": True,
        "max_position_embeddings": 256,
        "dropout": 0.1,
        **SPECIAL,
    }
    for stack in ("encoder", "decoder"):
        fields |= {f"{stack}_layers": layers, f"{stack}_attention_heads": heads, f"{stack}_ffn_dim": inner}
    return fields | more


@dataclass(frozen=True)
class Question:
    """A question about systems that are timed on the same tasks.

    Args:
        title: the question.
        systems: name to config; the models get random weights.
        yardstick: the system whose time divides the times of all systems.
        tasks: the tasks that are timed.
    """

    title: str
    systems: dict[str, PreTrainedConfig]
    yardstick: str
    tasks: tuple[Training | Decoding, ...]


SMALL = size(3, 256, 4, 1024)
BASE = size(6, 512, 8, 2048)
LSTM = {name: value for name, value in BASE.items() if name != "activation_function"}
LARGE = {"sentences": 128, "length": 64}  # the batch on a GPU: 8,192 target tokens
DEEP = size(6, 256, 4, 1024)

PRE = {"normalize_before": True}
JOINTS = {  # ways to join the layers: config fields
    "pre-norm": PRE,
    "post-norm": {},
    "DeepNorm": {"residual": "deepnorm"},
    "B2T": {"residual": "b2t"},
    "DLCL": {**PRE, "layer_aggregation": "dlcl"},
    "DenseFormer": {**PRE, "layer_aggregation": "denseformer"},
    "attention residuals": {**PRE, "residual": "attention"},
    "attention residuals, blocks of 3 layers": {**PRE, "residual": "attention", "attention_block": 3},
    "hyper-connections, static": {**PRE, "residual": "hyper", "dynamic_streams": False},
    "hyper-connections, dynamic": {**PRE, "residual": "hyper"},
    "mHC": {**PRE, "residual": "mhc"},
    "RK2": {**PRE, "encoder_solver": "rk2"},
}


def joined(encoder_layers: int) -> Question:
    """The question about joints, for models with `encoder_layers` encoder layers and six decoder layers."""
    fields = DEEP | {"encoder_layers": encoder_layers}
    return Question(
        f"What does each way to join layers cost, with {encoder_layers} + 6 layers?",
        {name: VanillaTransformerConfig(**fields, **joints) for name, joints in JOINTS.items()},
        "pre-norm",
        (Training(sentences=16), Decoding(1, 1), Decoding(32, 1), Decoding(32, 5)),
    )


QUESTIONS = {
    "families": Question(
        "What does each family cost on a GPU at base size, beside Hugging Face's Marian?",
        {
            "Marian": MarianConfig(**BASE, forced_eos_token_id=None),
            "vanilla": VanillaTransformerConfig(**BASE),
            "MAT, 3 branches": MATConfig(**BASE, attention_branches=3, drop_branch=0.3),
            "Multi-Path, 2 paths": MultiPathConfig(**BASE, encoder_paths=2),
            "latent depth in both stacks": LatentDepthConfig(**BASE),
            "depth-wise LSTM": DepthwiseLSTMConfig(**LSTM),
        },
        "Marian",
        (*(Training(precision, **LARGE) for precision in ("float32", "bfloat16", "float16")), Decoding(64, 5)),
    ),
    "joints": joined(6),
    "joints_deep": joined(24),
    "marian": Question(
        "Is our vanilla Transformer as fast as Hugging Face's Marian of the same size?",
        {"Marian": MarianConfig(**SMALL, forced_eos_token_id=None), "vanilla": VanillaTransformerConfig(**SMALL)},
        "Marian",
        (Training(), Training("bfloat16"), *DECODING),
    ),
    "mat": Question(
        "What do attention branches cost, and what does dropping them save?",
        {
            "vanilla": VanillaTransformerConfig(**SMALL),
            "MAT, 3 branches": MATConfig(**SMALL, attention_branches=3, drop_branch=0.0),
            "MAT, 3 branches, drop-branch 0.2": MATConfig(**SMALL, attention_branches=3, drop_branch=0.2),
            "MAT, 3 branches, drop-branch 0.3": MATConfig(**SMALL, attention_branches=3, drop_branch=0.3),
        },
        "vanilla",
        (Training(), Training("bfloat16"), *DECODING),
    ),
    "decoding": Question(
        "How fast is `generate`, beside Hugging Face's Marian of the same size, and with branches?",
        {
            "Marian": MarianConfig(**DEEP, forced_eos_token_id=None),
            "vanilla": VanillaTransformerConfig(**DEEP),
            "MAT, 3 branches": MATConfig(**DEEP, attention_branches=3, drop_branch=0.0),
            "vanilla, as many heads as 3 branches": VanillaTransformerConfig(**size(6, 768, 12, 1024)),
        },
        "Marian",
        DECODING,
    ),
    "multipath": Question(
        "Are paths as fast as depth at equal parameters? (Lin et al. 2023, Figure 8)",
        {
            "24 layers of 1 path": VanillaTransformerConfig(**DEEP | {"encoder_layers": 24}, normalize_before=True),
            "6 layers of 4 paths, summed": MultiPathConfig(
                **DEEP, encoder_paths=4, path_norm=False, learnable_path_weights=False, more_features=False
            ),
            "6 layers of 4 paths, + PathNorm and weights": MultiPathConfig(
                **DEEP, encoder_paths=4, more_features=False
            ),
            "6 layers of 4 paths, + more features": MultiPathConfig(**DEEP, encoder_paths=4),
        },
        "24 layers of 1 path",
        (Training(), Training("bfloat16")),
    ),
    "depthwise_lstm": Question(
        "What does a depth-wise LSTM cost beside the operations that it adds?",
        {
            "vanilla": VanillaTransformerConfig(**BASE, normalize_before=True, attention_bias=False),
            "equal width": DepthwiseLSTMConfig(**LSTM),
            "equal parameters": DepthwiseLSTMConfig(
                **LSTM | {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}, share_gates="global"
            ),
            "hidden state of one layer (Eq. 5)": DepthwiseLSTMConfig(**LSTM, lstm_hidden="single"),
            "concatenation": DepthwiseLSTMConfig(**LSTM, decoder_merge="concat"),
            "two in a decoder layer": DepthwiseLSTMConfig(**LSTM, decoder_merge="two_lstms"),
        },
        "vanilla",
        (Training(sentences=16), Training("bfloat16", sentences=16), Decoding(1, 1), Decoding(32, 4)),
    ),
}
