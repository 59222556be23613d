"""What the papers plot."""
