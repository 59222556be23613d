"""One run from raw text to a scored model: its recipe, its folder, its two tasks."""
