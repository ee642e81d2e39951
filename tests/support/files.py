"""Files that several processes and threads of the tests write and read."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that others may be reading or writing. They see the old content or the new one, never a part."""
    written = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    written.write_bytes(content)
    written.replace(path)
