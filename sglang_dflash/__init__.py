"""DFlash speculative decoding for SGLang, as a plugin."""

from sglang_dflash.version import __version__

__all__ = ["__version__"]
