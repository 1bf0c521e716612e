"""A copy of Horovod's source in which the loss of a rank is an error that Python can catch.

An elastic ring stops Horovod and starts it again when a rank is lost. Two faults are in the way.

- Horovod 0.28.1 starts in a thread that catches nothing. A rank that is lost meanwhile makes Gloo
  raise there, and ends all other processes too (horovod#2484, horovod#2908).
- When a connection ends, its Gloo tells all operations that wait for their turn, but not the one
  whose bytes are under way. That one waits until HOROVOD_GLOO_TIMEOUT_SECONDS are over.
"""

import os
import shutil
import sys
from pathlib import Path

CATCH = """} catch (const std::exception& ex) {
    LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
    global_gloo_context.Finalize();
    state.initialization_failed = true;
    return;
  }"""
INITIALIZE = "global_gloo_context.Initialize(ParseGlooIface());"
INITIALIZE_TABLE = "state.process_set_table.Initialize(global_gloo_context);"
NOT_INITIALIZED = "// Reset initialization flag\n    horovod_global.initialization_done = false;"
TELL_QUEUED = """    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
  }

  // Loop through pending send operations."""

# By file: what to replace, and by what. Each text to replace is there once.
PATCHES = {
    "horovod/common/operations.cc": {
        INITIALIZE: f"try {{ {INITIALIZE} {CATCH}",
        INITIALIZE_TABLE: f"try {{ {INITIALIZE_TABLE} {CATCH}",
        NOT_INITIALIZED: f"{NOT_INITIALIZED}\n    horovod_global.initialization_failed = false;",
    },
    "third_party/gloo/gloo/transport/tcp/pair.cc": {
        TELL_QUEUED: """    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
    NonOwningPtr<UnboundBuffer> sending(op.ubuf);
    if (sending) {
      sending->signalException(ex);
    }
  }

  NonOwningPtr<UnboundBuffer> receiving(rx_.ubuf);
  if (receiving) {
    receiving->signalException(ex);
  }

  // Loop through pending send operations.""",
    },
}


def mended_source(source: Path, copy: Path) -> Path:
    """Makes a copy of Horovod's source with PATCHES applied, and returns its path.

    Files that stay the same are hard links: the source may be in uv's cache, and is left alone.

    Args:
        source: the unpacked source of Horovod 0.28.1.
        copy: where the copy goes; what is there is deleted.
    """
    if copy.exists():
        shutil.rmtree(copy)
    ignored = shutil.ignore_patterns("build", "*.egg-info")
    shutil.copytree(source, copy, symlinks=True, ignore=ignored, copy_function=os.link)
    for name, patches in PATCHES.items():
        path = copy / name
        text = path.read_text(encoding="utf-8")
        for old, new in patches.items():
            if text.count(old) != 1:
                sys.exit(f"{source / name} does not hold {old} once: is this Horovod 0.28.1?")
            text = text.replace(old, new)
        path.unlink()  # the link
        path.write_text(text, encoding="utf-8")
    return copy
