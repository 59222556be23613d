<<<<<<< HEAD
"""Make a plain model of the layers that a latent-depth model has chosen.

    python scripts/prune_latent_depth.py runs/multi30k_en_de_latent runs/pruned
    python scripts/prune_latent_depth.py runs/multi30k_en_xx_latent runs/pruned-de --language de
    python scripts/prune_latent_depth.py runs/multi30k_en_de_latent runs/folded --selection tempered

The model is a folder or a Hub id. Of several posteriors one is given by its name or index. `--selection tempered` (or
soft) keeps all layers and folds their weights in; a model that is evaluated so, as after training with soft samples,
is pruned so by default. The output is a `vanilla_transformer` with the model's
generation config and tokenizer. It is read back and its logits on a random batch are compared with the model's.
"""

from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hf_deepwide import LatentDepthForConditionalGeneration, prune
from hf_deepwide_cli.parser import Parser
from hf_deepwide.durable import Saving, check_output, whole_folder
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.loading import load_model, load_tokenizer
from hf_deepwide.prune import SELECTIONS, kept_layers, posterior_index
from hf_deepwide.warm_start import logit_difference

TOLERANCE = 1e-5  # relative to the largest logit, or to 1; in float32


def main() -> None:
    """Load, prune, save, read back and compare."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="a folder or Hub id of a latent-depth model")
    parser.add_argument("output", type=Path, help="folder for the result; it is made")
    parser.add_argument("--language", help="name or index of the posterior; not needed where there is one")
    parser.add_argument("--selection", choices=SELECTIONS, help="default: the model's `inference_selection`")
    script = parser.parse_args()
    disable_progress_bar()
    check_output(script.output)

    model, tokenizer = load(script.model)
    if script.selection is not None:
        model.config.inference_selection = script.selection
    pruned = prune(model, script.language)
    with whole_folder(script.output) as draft:
        with Saving(script.output):
            pruned.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
        saved = load_model(AutoModelForSeq2SeqLM, draft)
        posteriors = torch.full((4,), posterior_index(model.config, script.language))
        difference, largest = logit_difference(model.float(), saved.float(), posteriors=posteriors)
        if pruned.dtype == torch.float32 and not difference <= TOLERANCE * max(1, largest):
            raise SystemExit("error: the result does not compute the model's function; please report this")
    for stack, layers in kept_layers(model, script.language).items():
        print(f"{stack}: selects {len(layers)} of {getattr(model.config, f'{stack}_layers')} layers: {layers}")
    print(f"{script.output}: {pruned.num_parameters():,} parameters, of {model.num_parameters():,}")
    print(f"largest difference of logits from the model's: {difference:.2g} (logits up to {largest:.3g})")


def load(where: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer; a UserError where they cannot be loaded."""
    model, tokenizer = load_model(AutoModelForSeq2SeqLM, where), load_tokenizer(where)
    if not isinstance(model, LatentDepthForConditionalGeneration):
        raise UserError(f"{where} is a {type(model).__name__}; only a latent-depth model can be pruned")
    return model, tokenizer
=======
"""Make a plain model of chosen layers; the same as `hf-deepwide prune`, which `--help` explains."""
>>>>>>> fa4a97c (Give init and prune the one command, too)

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("prune")
