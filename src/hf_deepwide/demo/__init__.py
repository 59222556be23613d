"""A page that translates with one or several models side by side, and shows what each architecture did.

    hf_deepwide.demo.serve(["runs/vanilla", "runs/mat"])       # or: hf-deepwide demo runs/vanilla runs/mat

`systems` translates, `pictures` draws, `page` is the page. Gradio serves the page (`pip install 'hf_deepwide[demo]'`).
"""

from .page import build_page, serve

__all__ = ["build_page", "serve"]
