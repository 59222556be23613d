<<<<<<< HEAD
"""Make a wide model that starts as a trained base: proximal initialisation, MAT section 3.3.

    python scripts/proximal_init.py runs/multi30k_en_de_vanilla runs/mat3 --attention_branches 3 --drop_branch 0.2
    python scripts/proximal_init.py Helsinki-NLP/opus-mt-en-de runs/mat2 --attention_branches 2 --dropout 0.3

The base is a folder or a Hub id of a vanilla model or MAT of ours, Marian, BART, mBART, M2M100 or NLLB. Fields of the
family's config can be given by name where they leave the base's function as it is. Other families by --family:

    python scripts/proximal_init.py Helsinki-NLP/opus-mt-en-de runs/ours --family vanilla_transformer

The output is a checkpoint with the base's generation config and tokenizer, for `from_pretrained`, `pipeline` and
`init_from` of a recipe, whose source_lang and target_lang are then the codes of an mBART's, M2M100's or NLLB's
tokenizer (deu_Latn). It is read back and its logits on a random batch are compared with the base's, in float32.
"""

import logging
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM
from transformers.utils.logging import disable_progress_bar

from hf_deepwide_cli.parser import Parser
from hf_deepwide.durable import Saving, check_output, whole_folder
from hf_deepwide.errors import run_script
from hf_deepwide.loading import load_model, load_tokenizer
from hf_deepwide.registration import FAMILIES
from hf_deepwide.training.recipe import parse_overrides, parse_script
from hf_deepwide.warm_start import load_base, logit_difference, preserves_function

TOLERANCE = 1e-5  # relative to the largest logit, or to 1
ROUNDED_TOLERANCE = 1e-2  # of a base in half precision, whose computed positions are rounded and ours are not


def main() -> None:
    """Load, widen, save, read back and compare."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("base", help="a folder or Hub id")
    parser.add_argument("output", type=Path, help="folder for the result; it is made")
    parser.add_argument("--family", default="mat", choices=FAMILIES, help="the result's family (default: %(default)s)")
    parser.add_argument("--no_tokenizer", action="store_true", help="do without a tokenizer, where the base has none")
    script, overrides = parse_script(parser)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    disable_progress_bar()
    check_output(script.output)

    base = load_base(script.base)
    tolerance = ROUNDED_TOLERANCE if base.dtype.itemsize < 4 else TOLERANCE
    told = f"{script.base}: no tokenizer could be loaded (--no_tokenizer does without)"
    tokenizer = None if script.no_tokenizer else load_tokenizer(script.base, told)
    model = FAMILIES[script.family].lm.from_base(base, **dict(parse_overrides(overrides)))
    with whole_folder(script.output) as draft:
        with Saving(script.output):
            model.save_pretrained(draft)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
        saved = load_model(AutoModelForSeq2SeqLM, draft)
        difference, largest = logit_difference(base.float(), saved.float())
        if preserves_function(model.config) and not difference <= tolerance * max(1, largest):
            raise SystemExit("error: the result does not compute the base's function; please report this")
    print(f"{script.output}: {script.family}, {model.num_parameters():,} parameters; base: {base.num_parameters():,}")
    print(f"largest difference of logits from the base's: {difference:.2g} (logits up to {largest:.3g})")
=======
"""Start a model from a trained base; the same as `hf-deepwide init`, which `--help` explains."""
>>>>>>> fa4a97c (Give init and prune the one command, too)

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("init")
