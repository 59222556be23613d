"""From a recipe to a trained, scored and documented model: recipe, trainer, checkpoints, run."""
