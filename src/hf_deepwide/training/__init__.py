"""The trainer: arguments, batches, faults, sharding, checkpoints. It knows no recipe."""
