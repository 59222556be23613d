"""Print digests of trained weights. A code change that should alter no number must leave the digests the same.

    python benchmarks/weight_digests.py > before.txt     # two minutes, before the change
    python benchmarks/weight_digests.py | diff before.txt -

The script trains a tiny model of every family for 12 updates on the embedded corpus, and the quick start for 25
updates. It prints 16 digits of the SHA-256 of each model's weights, and the model's BLEU. Weights depend on the
machine, so compare on one machine only.
"""

import hashlib
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from hf_deepwide.runs.recipe import load_recipe
from hf_deepwide.runs.run import run_recipe

FAMILIES = {
    "vanilla": {"family": "vanilla_transformer", "attention_branches": 1},
    "vanilla, DLCL and LayerDrop": {
        "family": "vanilla_transformer",
        "attention_branches": 1,
        "layer_aggregation": "dlcl",
        "layer_drop": 0.2,
    },
    "vanilla, ReZero": {"family": "vanilla_transformer", "attention_branches": 1, "residual": "rezero"},
    "vanilla, DeepNorm": {"family": "vanilla_transformer", "attention_branches": 1, "residual": "deepnorm"},
    "vanilla, B2T": {"family": "vanilla_transformer", "attention_branches": 1, "residual": "b2t"},
    "vanilla, DenseFormer": {
        "family": "vanilla_transformer",
        "attention_branches": 1,
        "layer_aggregation": "denseformer",
    },
    "vanilla, RK2": {"family": "vanilla_transformer", "attention_branches": 1, "encoder_solver": "rk2"},
    "vanilla, attention residuals": {
        "family": "vanilla_transformer",
        "attention_branches": 1,
        "residual": "attention",
        "normalize_before": True,
    },
    "vanilla, mHC": {
        "family": "vanilla_transformer",
        "attention_branches": 1,
        "residual": "mhc",
        "normalize_before": True,
    },
    "MAT": {"family": "mat", "ffn_branches": 2, "drop_branch": 0.3},
    "MAT, head drop": {"family": "mat", "drop_unit": "head", "drop_branch": 0.3},
    "Multi-Path": {
        "family": "multipath_transformer",
        "encoder_paths": 3,
        "drop_branch": 0,
        "attention_branches": 1,
    },
    "depth-wise LSTM": {"family": "depthwise_lstm", "attention_branches": 1},
    "latent depth": {"family": "latent_depth", "target_encoder_layers": 1},
}
TINY_MODEL = {
    "d_model": 16,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
TINY = {
    "data.train_size": 300,
    "tokenizer.vocab_size": 300,
    "training.max_tokens": 256,
    "training.gradient_accumulation_steps": 2,
}
QUICK_START = {"data.train_size": 2000}


def digest(folder: Path, steps: int, settings: dict[str, object]) -> str:
    """Train the quick start with other settings in `folder`; return the digest of its weights, and its BLEU."""
    settings = settings | {
        "training.max_steps": steps,
        "training.warmup_steps": steps // 3,
        "training.save_strategy": "steps",
        "training.eval_strategy": "steps",
        "training.save_steps": steps,
        "training.eval_steps": steps,
        "training.bf16": False,
        "training.disable_tqdm": True,
        "training.output_dir": folder,
        "evaluation.num_beams": 1,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value).lower())]
    words[words.index("--training.output_dir") + 1] = str(folder)  # the one value whose case matters
    with redirect_stdout(sys.stderr):  # the trainer prints its log
        results = run_recipe(load_recipe("quickstart", words))
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]
    return f"{weights}  BLEU {results['test']['bleu']:.6f}"


def main() -> None:
    """Print one line a model."""
    disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums depends on the number of threads
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, fields) in enumerate(FAMILIES.items()):
            model = {f"model.{key}": value for key, value in (TINY_MODEL | fields).items()}
            rate = {"training.posterior_learning_rate": 1e-2} if fields["family"] == "latent_depth" else {}
            print(f"{name}: {digest(Path(folder) / str(number), 12, model | TINY | rate)}", flush=True)
        print(f"quick start: {digest(Path(folder) / 'quickstart', 25, QUICK_START)}", flush=True)


if __name__ == "__main__":
    main()
