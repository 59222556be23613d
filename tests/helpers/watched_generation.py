"""Count how often `generate` is called, and how often the fast decoder serves the call."""

from collections import Counter

from hf_deepwide.models.decoding import DecodingCache
from hf_deepwide.models.modeling_base import DeepWideForConditionalGeneration


def watch_generation(monkeypatch):
    """Return a counter of the calls of `generate`, and of the decoder's twins that were made for the calls."""
    counts, generate, begin = Counter(), DeepWideForConditionalGeneration.generate, DecodingCache.begin

    def counted_generate(model, *args, **kwargs):
        counts["generate"] += 1
        return generate(model, *args, **kwargs)

    def counted_begin(cache):
        counts["twins"] += 1
        begin(cache)

    monkeypatch.setattr(DeepWideForConditionalGeneration, "generate", counted_generate)
    monkeypatch.setattr(DecodingCache, "begin", counted_begin)
    return counts
