"""Models on the Hub: a folder that loads without this package, a Space, and their cards."""
