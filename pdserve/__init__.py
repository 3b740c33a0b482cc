"""What the services share. Imports no service."""

__version__ = "0.1.0"
