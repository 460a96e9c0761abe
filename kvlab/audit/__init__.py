"""One isolation contract, run against engines: in this process, or over HTTP.

`python -m kvlab.audit --help` is the command line; notebook 12 shows how to read what it says.
"""

from kvlab.audit.audit import Audit, Result
from kvlab.audit.engine import Answer, Ask, Engine, EngineError
from kvlab.audit.prompts import Writer

__all__ = ["Answer", "Ask", "Audit", "Engine", "EngineError", "Result", "Writer"]
