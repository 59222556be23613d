"""Make a plain model of the layers that a latent-depth model has chosen.

    hf-deepwide prune runs/latent runs/pruned
    hf-deepwide prune runs/multi30k_en_xx_latent runs/pruned-de --language de
    hf-deepwide prune runs/latent runs/folded --selection tempered

The model is a folder or a Hub id. If it has several posteriors, --language names one. `--selection tempered` (or soft)
keeps all layers and multiplies their weights by z; this is the default after training with soft samples. The output is
a `vanilla_transformer` with the model's generation config and tokenizer. The command loads the output again, and
compares its logits on a random batch with the model's.
"""

import argparse
from pathlib import Path

TOLERANCE = 1e-5  # relative to the largest logit, or to 1; in float32


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", help="a folder or Hub id of a latent-depth model")
    parser.add_argument("output", type=Path, help="folder for the result; the command creates it")
    parser.add_argument("--language", help="name or index of the posterior; not needed where there is one")
    parser.add_argument("--selection", help="hard, tempered or soft; default: the model's `inference_selection`")


def run(args: argparse.Namespace) -> None:
    """Load the model, prune it, save the result, load it again, and compare."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    from hf_deepwide import prune
    from hf_deepwide.durable import check_output, saving, whole_folder
    from hf_deepwide.errors import UserError, quote
    from hf_deepwide.loading import load_model, load_tokenizer
    from hf_deepwide.prune import SELECTIONS, is_prunable, kept_layers, posterior_index
    from hf_deepwide.warm_start import logit_difference

    check_output(args.output)
    if args.selection not in (None, *SELECTIONS):
        raise UserError(f"--selection {quote(args.selection)}; accepted: {', '.join(SELECTIONS)}")
    model, tokenizer = load_model(AutoModelForSeq2SeqLM, args.model), load_tokenizer(args.model)
    if not is_prunable(model):
        raise UserError(f"{args.model} is a {type(model).__name__}; only a latent-depth model can be pruned")
    own = model.config.inference_selection
    if args.selection is not None:
        model.config.inference_selection = args.selection
    pruned = prune(model, args.language)
    with whole_folder(args.output) as draft:
        with saving(args.output):
            pruned.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
        saved = load_model(AutoModelForSeq2SeqLM, draft)
        posteriors = torch.full((4,), posterior_index(model.config, args.language))
        difference, largest = logit_difference(model.float(), saved.float(), posteriors=posteriors)
        if pruned.dtype == torch.float32 and not difference <= TOLERANCE * max(1, largest):
            raise SystemExit("error: the result does not compute the model's function; please report this")
    for stack, layers in kept_layers(model, args.language).items():
        named = [layer + 1 for layer in layers]  # counted from 1, as in figures
        print(f"{stack}: selects {len(layers)} of {getattr(model.config, f'{stack}_layers')} layers: {named}")
    print(f"{args.output}: {pruned.num_parameters():,} parameters, of {model.num_parameters():,}")
    print(f"largest difference of logits from the model's: {difference:.2g} (logits up to {largest:.3g})")
    if model.config.inference_selection != own:
        model.config.inference_selection = own
        difference, _ = logit_difference(model, pruned.float(), posteriors=posteriors)
        print(f"with the model's own selection, {own}, the largest difference is {difference:.2g}")
