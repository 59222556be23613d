"""`hf_deepwide.evaluation.metrics.score` as a module that `evaluate.load` reads from this folder."""
