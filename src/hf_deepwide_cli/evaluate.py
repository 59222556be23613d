r"""Score a checkpoint or a file of translations, and test whether other systems differ from it.

A checkpoint (a folder or a Hub id of any encoder-decoder model) on a test set:

    hf-deepwide evaluate --model runs/multi30k-mat \
        --source test_2016_flickr.en.gz --reference test_2016_flickr.de.gz \
        --translations mat.de.txt --output mat.json

A file of translations, one in each line:

    hf-deepwide evaluate --hypotheses mat.de.txt --reference test_2016_flickr.de.gz

Other systems against this system, by paired bootstrap resampling and approximate randomisation. If the two tests
disagree, believe the randomisation: the bootstrap is too lenient. Each system is a file of translations, or a
checkpoint, which needs --source:

    hf-deepwide evaluate --hypotheses vanilla.de.txt --reference test_2016_flickr.de.gz \
        --compare mat.de.txt runs/multi30k-deep --source test_2016_flickr.en.gz --metrics bleu chrf

Scores as in the MAT paper for IWSLT'14 (tokenised, lowercased, beam 5, length penalty 1.2):

    hf-deepwide evaluate --model runs/iwslt14-mat \
        --source test.de.gz --reference test.en.gz --metrics multi_bleu --lowercase \
        --num_beams 5 --length_penalty 1.2

A multilingual checkpoint on all its language pairs, each with its own files, and the average over the pairs:

    hf-deepwide evaluate --model runs/multi30k_en_xx --pairs en-de en-fr en-cs \
        --source 'test_2016_flickr.{source_lang}.gz' --reference 'test_2016_flickr.{target_lang}.gz' \
        --translations 'out.{pair}.txt' --output multilingual.json

For a single pair, give --source_lang en --target_lang de instead of --pairs. With --pairs, languages replace the names
in braces, also in --model: --model 'runs/pruned-{target_lang}' means the pruned models of all languages.

If one language is the source of some pairs and the target of all others, two more means are reported: of the pairs
from this language, and of the pairs into it. The scores of papers on OPUS-100 (BLEU_94, BLEU_4, win ratio against
Zhang et al. 2020), from the translations of a finished run:

    ZHANG=benchmarks/opus100_zhang2020.tsv
    hf-deepwide evaluate --pairs $(cut -sf1 $ZHANG | tail -n +2) --win_ratio $ZHANG --metrics bleu \
        --hypotheses 'runs/opus100_m2m_dwlstm/translations.{pair}.txt' --average_languages de zh br te \
        --reference 'opus100/supervised/{sorted_pair}/opus.{sorted_pair}-test.{target_lang}'

Files are UTF-8 text, or compressed if their names end in .gz. Existing files are not overwritten without --overwrite.
"""

import argparse
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. An argument that is not given is left out, and the library sets its default."""
    parser.argument_default = argparse.SUPPRESS
    option = parser.add_argument
    option("--reference", required=True, help="file of reference translations, one a line")
    option("--model", help="checkpoint to score: a folder, an exported one too, or a Hub id")
    option("--hypotheses", help="file of translations to score")
    option("--source", help="file of source sentences, for checkpoints")
    option("--compare", nargs="+", help="systems to test against the scored one: files or checkpoints")
    option("--output", help="JSON file for the results")
    option("--translations", help="file for the model's translations")
    option("--overwrite", action="store_true", help="replace existing output files")
    option("--seed", type=int, help="seed of the significance tests")
    option("--trials", type=int, help="trials of the approximate randomisation")
    option("--source_lang", help="source language, for multilingual models and tokenizers")
    option("--target_lang", help="target language, for the same models, and for moses_bleu and --tokenize auto")
    option("--pairs", nargs="+", help="language pairs (en-de) to evaluate one after the other, and on average")
    option("--win_ratio", help="with --pairs: TSV table of others' scores, with the header pair and systems' names")
    option("--device", help="default: a GPU where there is one")
    option("--trust_remote_code", action="store_true", help="run model code from the checkpoint")
    search = parser.add_argument_group(
        "search and scores, as in the section evaluation of a recipe",
        "Beams, length penalty and early stopping that are not given are those of the model's generation config.",
    )
    search.argument_default = argparse.SUPPRESS
    option = search.add_argument
    option("--num_beams", type=int, help="beam size; 1 is greedy search")
    option("--length_penalty", type=float, help="larger favours longer outputs")
    option("--early_stopping", type=boolean, help="stop a sentence at num_beams finished hypotheses")
    option("--max_length_factor", type=float, help="most tokens of a translation: this number times the source's, …")
    option("--max_length_offset", type=int, help="… plus this number")
    option("--max_tokens", type=int, help="source tokens in a batch")
    option("--precision", help="float32, bfloat16 or float16")
    accepted = (
        "of bleu, chrf, multi_bleu, moses_bleu (default: the first three); for code: sentence_bleu4, valid_python, "
        "valid_python_line, valid_java"
    )
    option("--metrics", nargs="+", help=accepted)
    option("--lowercase", type=boolean, nargs="?", const=True, help="score without regard to case")
    option("--tokenize", help="sacreBLEU's tokenizer")
    option("--average_languages", nargs="+", help="average the pairs with one of these languages on their own, too")
    option("--bootstrap_samples", type=int, help="resamples of the paired bootstrap")


def boolean(word: str) -> bool:
    """Return the value of a word such as `true` or `false`, as in a recipe."""
    values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if word.lower() not in values:
        raise argparse.ArgumentTypeError(f"{word[:80]!r} is neither true nor false")
    return values[word.lower()]


def refuse_unused(given: dict[str, Any]) -> None:
    """Refuse options for translating if nothing is translated, and options for tests without `--compare`."""
    from hf_deepwide.data.arguments import fill_in
    from hf_deepwide.errors import UserError
    from hf_deepwide.evaluation.arguments import SEARCH
    from hf_deepwide.evaluation.evaluate import is_checkpoint

    systems, pairs = given.get("compare", ()), given.get("pairs", ())
    if pairs:
        systems = [str(fill_in(name, pair, "--compare")) for name in systems for pair in pairs]
    translates = "model" in given or any(map(is_checkpoint, systems))
    unused = [name for name in (*SEARCH, "max_tokens", "precision") if name in given]
    if unused and not translates:
        raise UserError(f"--{unused[0]} is about translating, and --hypotheses is translated already; leave it out")
    tests = [name for name in ("trials", "seed", "bootstrap_samples") if name in given]
    if tests and "compare" not in given:
        raise UserError(
            f"--{tests[0]} belongs to the tests against other systems; name these by --compare, or leave it out"
        )


def run(args: argparse.Namespace) -> None:
    """Evaluate."""
    from dataclasses import fields

    from hf_deepwide.evaluation.arguments import SEARCH, EvaluationArguments
    from hf_deepwide.evaluation.evaluate import Request, evaluate

    given = vars(args)
    own = {field.name for field in fields(Request)}
    evaluation = EvaluationArguments.from_options(**{name: given[name] for name in given if name not in own})
    refuse_unused(given)
    evaluate(
        Request(
            **{name: value for name, value in given.items() if name in own},
            own_search=[name for name in SEARCH if name not in given],
        ),
        evaluation,
    )
