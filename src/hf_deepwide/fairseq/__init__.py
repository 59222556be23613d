"""Checkpoints of fairseq, as folders of ours: read safely, named anew, and checked until no tensor is left."""
