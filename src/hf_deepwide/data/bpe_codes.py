"""Subword merges that somebody has learnt with subword-nmt, as a tokenizer that `AutoTokenizer` loads.

Published scores belong to a segmentation. With the same merges a sentence has the same pieces here as there.
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
ENCODING = "utf-8-sig"  # a byte order mark is no text
VERSION, END_OF_WORD = "#version: 0.2", "</w>"
COUNTED = re.compile(r"[^ ]+ [^ ]+ \d+")  # a merge of fastBPE


def tokenizer_from_codes(codes: Path, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of subword-nmt's merges (Sennrich et al. 2016, algorithm 1).

    Text is split at white space only, so it must be tokenised already. The entries are the special tokens, each
    character of `texts` inside and at the end of a word, and each merge. The vocabulary of subword-nmt is a little
    smaller: it lists only pieces that occur in the segmented text.

    Args:
        codes: what `subword-nmt learn-bpe` writes, `.gz` too.
        texts: the training data, whose characters are the smallest pieces.

    Raises:
        UserError: the file is missing or holds something else, or there is no text.
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
    """Make a tokenizer of merges whose pieces are all in the vocabulary."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=SPECIAL_TOKENS["unk_token"], end_of_word_suffix=END_OF_WORD
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return finish(tokenizer)


def finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Let each sentence end with `</s>`, and wrap the tokenizer for Transformers."""
    end = SPECIAL_TOKENS["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    # Cleaning up would delete the space before "?" and "!" that French has, and no round trip would be exact.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, padding_side="right", **SPECIAL_TOKENS
    )


def read_codes(path: Path, prefix: str = "tokenizer.codes") -> list[tuple[str, str]]:
    """The merges in a file of subword-nmt or fastBPE, most frequent first.

    Each line is a merge. A file of fastBPE has no first line with a version, and counts behind the merges.

    Args:
        path: the file.
        prefix: how messages begin.

    Raises:
        UserError: there is no such file, or a line is not a merge.
    """
    if not path.is_file():
        raise UserError(f"{prefix}: there is no file {path}")
    try:
        is_packed = path.suffix == ".gz"
        with gzip.open(path, "rt", encoding=ENCODING) if is_packed else path.open(encoding=ENCODING) as file:
            lines = file.read().removesuffix("\n").split("\n")  # other ends of lines can be pieces
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{prefix}: {path} cannot be read ({one_line(error)})") from error
    counted = COUNTED.fullmatch(lines[0]) is not None
    if not counted and lines[0] != VERSION:
        raise UserError(f"{prefix}: {path} does not begin with {VERSION!r}, as a file of subword-nmt does")
    merges = []
    for number, line in enumerate(lines[0 if counted else 1 :], start=1 if counted else 2):
        pair = line.split(" ")[: 2 if COUNTED.fullmatch(line) and counted else None]
        if len(pair) != 2 or not all(pair):
            raise UserError(
                f"{prefix}: {path}, line {number}: {quote(line)} is no merge; accepted: two pieces and a space"
            )
        merges.append((pair[0], pair[1]))
    return merges
