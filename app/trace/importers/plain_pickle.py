"""Unpickles plain data and nothing else.

`pickle.load` runs whatever a file names. Refusing names (`find_class`) is not enough where the file is
hostile: the fast unpickler sizes its memo by a number in the file. So this is Python's own unpickler in
Python, whose memo is a dictionary, with only the opcodes left that protocols 2 to 5 write for plain types.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

from engine.memory.errors import TraceFileError

__all__ = ["load_plain"]

_PLAIN = (
    pickle.PROTO,
    pickle.FRAME,
    pickle.STOP,
    pickle.NONE,
    pickle.NEWTRUE,
    pickle.NEWFALSE,
    pickle.BININT,
    pickle.BININT1,
    pickle.BININT2,
    pickle.LONG1,
    pickle.LONG4,
    pickle.BINFLOAT,
    pickle.SHORT_BINUNICODE,
    pickle.BINUNICODE,
    pickle.BINUNICODE8,
    pickle.EMPTY_LIST,
    pickle.LIST,
    pickle.APPEND,
    pickle.APPENDS,
    pickle.EMPTY_TUPLE,
    pickle.TUPLE,
    pickle.TUPLE1,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.EMPTY_DICT,
    pickle.DICT,
    pickle.SETITEM,
    pickle.SETITEMS,
    pickle.MARK,
    pickle.BINGET,
    pickle.LONG_BINGET,
    pickle.BINPUT,
    pickle.LONG_BINPUT,
    pickle.MEMOIZE,
)


class _PlainUnpickler(pickle._Unpickler):
    """Knows no opcode that could name, call or build anything."""

    dispatch = {  # noqa: RUF012  # the base class declares it
        opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _PLAIN
    }

    def find_class(self, module: str, name: str) -> Any:
        """Never reached: no opcode of `_PLAIN` asks."""
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load_plain(data: bytes, name: str) -> Any:
    """The plain types (None, bool, int, float, str, list, tuple, dict) that `data` pickles.

    Raises
    ------
    TraceFileError
        `data` is truncated, no pickle, or has anything else in it. One line that begins with `name`.
    """
    try:
        return _PlainUnpickler(BytesIO(data)).load()
    except KeyError as error:
        code = error.args[0] if error.args else None
        what = f"opcode {code:#x} has no place in it" if isinstance(code, int) else "damaged"
    except (EOFError, IndexError):
        what = "truncated or damaged"
    except Exception:  # whatever bytes can do to an unpickler
        what = "damaged"
    raise TraceFileError(f"{name}: not a pickle of plain data: {what}")
