"""Records as one self-contained page. Reads no file and measures nothing."""

from winnow.bench.report.page import page

__all__ = ["page"]
