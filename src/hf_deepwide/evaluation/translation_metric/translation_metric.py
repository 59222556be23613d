"""SacreBLEU, chrF and tokenised BLEU as one metric of the `evaluate` library.

`evaluate` copies this file to another place and runs the copy, so the file imports only the installed package.
"""

import datasets
import evaluate

from hf_deepwide.evaluation.metrics import METRICS, score

_DESCRIPTION = """\
Corpus scores of translations with their signatures: sacreBLEU (Post 2018), chrF (Popovic 2015), and BLEU on
the text's own tokens, equal to multi-bleu.perl (Papineni et al. 2002).
"""
_CITATION = """\
@inproceedings{post-2018-call, title = "A Call for Clarity in Reporting {BLEU} Scores", author = "Post, Matt",
  booktitle = "Proceedings of the Third Conference on Machine Translation", year = "2018", pages = "186--191"}
"""
_INPUTS = """\
predictions: list of translations.
references: list of references, one for each translation.
lowercase, tokenize, target_lang, metrics: as in `hf_deepwide.evaluation.metrics.score`.
Returns its dictionary: bleu, chrf, multi_bleu, sentences, signature.
"""


class TranslationMetric(evaluate.Metric):
    """The metric of `evaluate.load(hf_deepwide.evaluation.metric_path()).compute(predictions=…, references=…)`."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        lowercase: bool = False,
        tokenize: str = "13a",
        target_lang: str | None = None,
        metrics: tuple[str, ...] = METRICS,
    ) -> dict:
        return score(
            predictions,
            references,
            lowercase=lowercase,
            tokenize=tokenize,
            target_lang=target_lang,
            metrics=metrics,
        )
