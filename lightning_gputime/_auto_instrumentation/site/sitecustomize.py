"""Module that Python imports at startup in the processes of `lightning_gputime run`.

It must run in any Python, even Python 2: the script may start tools from another environment.
"""

import importlib
import sys

# Run the `sitecustomize` that this file shadows, if any.
_own = sys.modules.pop(__name__)
_folder = __file__.rpartition("sitecustomize")[0].rstrip("/\\")
sys.path[:] = [path for path in sys.path if path.rstrip("/\\") != _folder]
try:
    importlib.import_module(__name__)
except ImportError as error:
    if getattr(error, "name", __name__) != __name__:
        raise
    sys.modules[__name__] = _own
finally:
    # Older versions cannot parse the package, and other environments may not have it.
    if sys.version_info >= (3, 11):  # noqa: UP036  # see above
        try:
            from lightning_gputime._auto_instrumentation import watch_imports
        except ImportError:
            pass
        else:
            watch_imports()
