"""ASGI middleware without dependencies that reports a server's load to Prequal's clients and to any client that reads ORCA."""

from .asgi import Middleware
from .load import Load, Request
from .report import Report
from .tracker import Outcome

__all__ = ["Load", "Middleware", "Outcome", "Report", "Request"]
