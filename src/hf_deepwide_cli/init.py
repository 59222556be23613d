"""Start a model of one of our families from a trained base (proximal initialisation, MAT section 3.3).

    hf-deepwide init runs/multi30k_en_de_vanilla runs/mat3 --attention_branches 3 --drop_branch 0.2
    hf-deepwide init Helsinki-NLP/opus-mt-en-de runs/mat2 --attention_branches 2 --dropout 0.3

The base is a folder or a Hub id: our vanilla model or MAT, Marian, BART, mBART, M2M100 or NLLB. Options set fields of
the new config. A field that would change the function of the base is refused, or a warning names the reason. --family
chooses another family:

    hf-deepwide init Helsinki-NLP/opus-mt-en-de runs/ours --family vanilla_transformer

The output is a checkpoint with the base's generation config and tokenizer, for `from_pretrained`, `pipeline` and
`init_from` of a recipe. A recipe for mBART, M2M100 or NLLB names languages by the codes of the tokenizer (deu_Latn).
The command loads the output again, and compares its logits on a random batch with the base's, in float32.
"""

import argparse
from pathlib import Path
from typing import Any

TAKES_OVERRIDES = True
TOLERANCE = 1e-5  # relative to the largest logit, or to 1
ROUNDED_TOLERANCE = 1e-2  # for a base in half precision: its computed positions are rounded, ours are not


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("base", help="a folder or Hub id")
    parser.add_argument("output", type=Path, help="folder for the result; the command creates it")
    parser.add_argument("--family", default="mat", help="the result's family (default: mat)")
    parser.add_argument("--no_tokenizer", action="store_true", help="do without a tokenizer, where the base has none")


def run(args: argparse.Namespace, overrides: list[str]) -> None:
    """Load the base, widen it, save the result, load it again, and compare."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    from hf_deepwide.durable import check_output, saving, whole_folder
    from hf_deepwide.errors import UserError, quote
    from hf_deepwide.families import FAMILIES, count_posteriors
    from hf_deepwide.loading import load_model, load_tokenizer
    from hf_deepwide.runs.recipe import parse_overrides
    from hf_deepwide.vanilla_form import as_vanilla, load_base
    from hf_deepwide.warm_start import logit_difference, preserves_function

    check_output(args.output)
    if args.family not in FAMILIES:
        raise UserError(f"--family {quote(args.family)}; accepted: {', '.join(FAMILIES)}")
    fields = dict(parse_overrides(overrides, "--field value"))
    for field in fields:
        having = [name for name, family in FAMILIES.items() if hasattr(family.config, field)]
        if args.family not in having and having:
            raise UserError(f"--{field}: {args.family} has no such field; give --family {' or '.join(having)}")
    base = load_base(args.base)
    tolerance = ROUNDED_TOLERANCE if base.dtype.itemsize < 4 else TOLERANCE
    prefix = f"{args.base}: no tokenizer could be loaded (--no_tokenizer does without)"
    tokenizer = None if args.no_tokenizer else load_tokenizer(args.base, prefix)
    model = FAMILIES[args.family].lm.from_base(base, **fields)
    preserves = preserves_function(model.config, as_vanilla(base)[0])
    with whole_folder(args.output) as draft:
        with saving(args.output):
            model.save_pretrained(draft)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
        saved = load_model(AutoModelForSeq2SeqLM, draft)
        several = count_posteriors(model.config) > 1  # all posteriors start alike, so any one can be used
        chosen: dict[str, Any] = {"posteriors": torch.zeros(4, dtype=torch.long)} if several else {}
        difference, largest = logit_difference(saved.float(), base.float(), **chosen)
        if preserves and not difference <= tolerance * max(1, largest):
            raise SystemExit("error: the result does not compute the base's function; please report this")
    print(f"{args.output}: {args.family}, {model.num_parameters():,} parameters; base: {base.num_parameters():,}")
    print(f"largest difference of logits from the base's: {difference:.2g} (logits up to {largest:.3g})")
