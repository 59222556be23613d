"""Dictionaries of fairseq, and a tokenizer that gives the same pieces and ids as fairseq with a dictionary.

A dictionary (`dict.en.txt`) has a piece and its count on each line. The ids of the pieces begin after four special
tokens. A piece that does not end a word is written with `@@`, as in subword-nmt and fastBPE.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..errors import UserError, one_line, quote
from .bpe_codes import END_OF_WORD, SPECIAL_TOKENS, bpe_tokenizer, finish, read_codes

CONTINUES = "@@"
OVERWRITE = " #fairseq:overwrite"  # after a symbol that may occur twice in a dictionary


def read_dictionary(path: Path, languages: Iterable[str] = ()) -> list[str]:
    """Read the symbols of a dictionary, in the order of their ids.

    Args:
        path: the file.
        languages: languages whose tokens (`__de__`) fairseq adds after the file's symbols.

    Raises:
        UserError: the file cannot be read, or a line is not a symbol and its count, or a line repeats a symbol.
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
        if symbol in special:  # fairseq still writes the first id for this text
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
    """Make a tokenizer in which the id of each symbol is its index in `symbols`.

    Text is split at white space, so it must be tokenised already, as for fairseq. Merges also make pieces that are not
    in the dictionary. These pieces get ids after the symbols; fairseq replaces them by the unknown token.

    Args:
        symbols: from `read_dictionary`.
        codes: merges of subword-nmt or fastBPE; None: each symbol is a word.
        languages: languages whose tokens are among the symbols.

    Raises:
        UserError: the dictionary has pieces of words and there are no codes, the codes cannot be read, or two symbols
            become one piece.
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
            raise UserError(
                f"two symbols of the dictionary become one piece, because {END_OF_WORD} marks the end of a word, and "
                f"a symbol ends in {END_OF_WORD} already; give the dictionary and the codes of one model"
            )
        vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*known, *pieces_of_merges]))}
        made = bpe_tokenizer(vocabulary, merges)
    tokens = sorted(special - set(SPECIAL_TOKENS.values()))
    if tokens:
        made.add_special_tokens({"extra_special_tokens": tokens})
    return made


def _continues(symbol: str) -> bool:
    """Return whether a symbol is a piece that does not end its word."""
    return symbol.endswith(CONTINUES) and symbol != CONTINUES


def _piece(symbol: str) -> str:
    """Return a symbol as codes write it: they mark the end of a word, not its continuation."""
    return symbol.removesuffix(CONTINUES) if _continues(symbol) else symbol + END_OF_WORD
