"""Existing subword merges, learnt with subword-nmt or fastBPE, as a tokenizer that `AutoTokenizer` loads.

A published score depends on the segmentation of the text. With the published merges a sentence has the same pieces as
in the publication.
"""

import gzip
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..errors import UserError, one_line, quote

SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}  # ids 0 to 3
ENCODING = "utf-8-sig"  # the byte order mark is not part of the text
VERSION, END_OF_WORD = "#version: 0.2", "</w>"
COUNTED = re.compile(r"[^ ]+ [^ ]+ \d+")  # a merge of fastBPE


def tokenizer_from_codes(codes: Path, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer from a file of merges (Sennrich et al. 2016, algorithm 1).

    Text is split at white space only, so it must be tokenised already. The vocabulary has the special tokens, the
    characters of `texts`, and the pieces of each merge. Each character has two entries: inside a word and at its end.
    The vocabulary of subword-nmt is a little smaller: it has only pieces that occur in the segmented text.

    Args:
        codes: a file that `subword-nmt learn-bpe` or fastBPE wrote, `.gz` too.
        texts: the training data, whose characters are the smallest pieces.

    Raises:
        UserError: the file is missing or is not a file of merges, or there is no text.
    """
    merges = read_codes(codes)
    characters = sorted({character for text in texts for character in text if not character.isspace()})
    if not characters:
        raise UserError("the tokenizer was given no text to train on")
    pieces = [
        *SPECIAL_TOKENS.values(),
        *characters,
        *(character + END_OF_WORD for character in characters),
        *(piece for pair in merges for piece in (*pair, "".join(pair))),
    ]
    return bpe_tokenizer({piece: number for number, piece in enumerate(dict.fromkeys(pieces))}, merges)


def bpe_tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Make a tokenizer from a vocabulary and merges; the vocabulary must contain all pieces of the merges."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=SPECIAL_TOKENS["unk_token"], end_of_word_suffix=END_OF_WORD
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return finish(tokenizer)


def finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Append `</s>` to each sentence, and wrap the tokenizer for Transformers."""
    end = SPECIAL_TOKENS["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    # Cleaning up would delete the French space before "?" and "!": decoding would not give back the text.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, padding_side="right", **SPECIAL_TOKENS
    )


def read_codes(path: Path, prefix: str = "tokenizer.codes") -> list[tuple[str, str]]:
    """Read the merges in a file of subword-nmt or fastBPE, most frequent first.

    Each line is a merge. A file of subword-nmt begins with a line for the version. A file of fastBPE has no such line,
    and has a count after each merge.

    Args:
        path: the file.
        prefix: beginning of error messages.

    Raises:
        UserError: there is no such file, or a line is not a merge.
    """
    if not path.is_file():
        raise UserError(f"{prefix}: there is no file {path}")
    try:
        is_packed = path.suffix == ".gz"
        with gzip.open(path, "rt", encoding=ENCODING) if is_packed else path.open(encoding=ENCODING) as file:
            lines = file.read().removesuffix("\n").split("\n")  # other line separators can be pieces
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{prefix}: {path} cannot be read ({one_line(error)})") from error
    counted = COUNTED.fullmatch(lines[0]) is not None
    if not counted and lines[0] != VERSION:
        raise UserError(
            f"{prefix}: {path} is no file of merges; accepted: a file of subword-nmt, which begins with {VERSION!r}, "
            "or a file of fastBPE, with a count in each line"
        )
    merges = []
    for number, line in enumerate(lines[0 if counted else 1 :], start=1 if counted else 2):
        pair = line.split(" ")[: 2 if COUNTED.fullmatch(line) and counted else None]
        if len(pair) != 2 or not all(pair):
            raise UserError(
                f"{prefix}: {path}, line {number}: {quote(line)} is no merge; accepted: two pieces and a space"
            )
        merges.append((pair[0], pair[1]))
    return merges
