"""Dictionaries of fairseq, and the tokenizer that cuts and numbers text as fairseq does with them.

A dictionary (`dict.en.txt`) has a piece and its count on each line; its ids begin after four special tokens. A piece
that does not end a word is written with `@@`, as subword-nmt and fastBPE do.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..errors import UserError, one_line, quote
from .bpe_codes import END_OF_WORD, SPECIAL_TOKENS, bpe_tokenizer, finish, read_codes

CONTINUES = "@@"
OVERWRITE = " #fairseq:overwrite"  # behind a symbol that may be there twice


def read_dictionary(path: Path, languages: Iterable[str] = ()) -> list[str]:
    """The symbols of a dictionary, each at the place of its id.

    Args:
        path: the file.
        languages: languages whose tokens (`__de__`) fairseq adds behind the file's symbols.

    Raises:
        UserError: there is no such file, or a line is not a symbol and its count, or repeats a symbol.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the dictionary {path} cannot be read: {one_line(error)}") from error
    special = [*SPECIAL_TOKENS.values()]
    symbols, places = [*special], {symbol: place for place, symbol in enumerate(special)}
    for number, line in enumerate(lines, start=1):
        if not line and number == len(lines):
            break
        entry = line.removesuffix(OVERWRITE)
        symbol, _, count = entry.rpartition(" ")
        if not symbol or not count.isdecimal():
            raise UserError(f"the dictionary {path}, line {number}: {quote(line)}; accepted: a symbol and its count")
        if symbol in places and entry == line:
            raise UserError(f"the dictionary {path}, line {number}: {quote(symbol)} is there twice")
        if symbol in special:  # fairseq itself goes on writing the first id
            symbols.append(f"<unused{len(symbols)}>")
            continue
        if symbol in places:  # text gets the newer id
            symbols[places[symbol]] = f"<unused{places[symbol]}>"
        places[symbol] = len(symbols)
        symbols.append(symbol)
    return [*symbols, *(f"__{language}__" for language in sorted(languages))]


def tokenizer_of_dictionary(
    symbols: Sequence[str], codes: Path | None = None, languages: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Make a tokenizer that gives each symbol its place as its id.

    Text is split at white space, so it must be tokenised already, as fairseq's was. Merges also make pieces that no
    dictionary has. They get ids behind the symbols. fairseq has the unknown token in their place.

    Args:
        symbols: from `read_dictionary`.
        codes: merges of subword-nmt or fastBPE; None: each symbol is a word.
        languages: languages whose tokens are among the symbols.

    Raises:
        UserError: pieces of words without codes, or codes that cannot be read.
    """
    special = {*SPECIAL_TOKENS.values(), *(f"__{language}__" for language in languages)}
    if codes is None:
        pieces = next((symbol for symbol in symbols if _continues(symbol) or symbol.startswith("▁")), None)
        if pieces is not None:
            raise UserError(
                f"the dictionary has {quote(pieces)}, a piece of a word: give the codes of subword-nmt or fastBPE "
                "that cut the words (pieces of sentencepiece are not supported)"
            )
        vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made = finish(tokenizer)
    else:
        merges = read_codes(codes, "codes")
        pieces_of_merges = (piece for pair in merges for piece in (*pair, "".join(pair)))
        known = [symbol if symbol in special else _piece(symbol) for symbol in symbols]
        if len(set(known)) < len(known):
            raise UserError(f"two symbols of the dictionary become one piece; {END_OF_WORD} marks the ends of words")
        vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*known, *pieces_of_merges]))}
        made = bpe_tokenizer(vocabulary, merges)
    tokens = sorted(special - set(SPECIAL_TOKENS.values()))
    if tokens:
        made.add_special_tokens({"extra_special_tokens": tokens})
    return made


def _continues(symbol: str) -> bool:
    """Whether a symbol is a piece that does not end its word."""
    return symbol.endswith(CONTINUES) and symbol != CONTINUES


def _piece(symbol: str) -> str:
    """A symbol as codes write it: the end of a word is marked, and not its continuation."""
    return symbol.removesuffix(CONTINUES) if _continues(symbol) else symbol + END_OF_WORD
