"""The load of a server, reported to Prequal's clients and to all that read ORCA: ASGI middleware without dependencies."""

from .asgi import Middleware
from .load import Load, Request
from .report import Report
from .tracker import Outcome

__all__ = ["Load", "Middleware", "Outcome", "Report", "Request"]
