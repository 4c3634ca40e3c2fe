"""A Kubernetes device plugin for GPUs: one process per node.

``ARCHITECTURE.md`` draws the modules and the data's way through them.
"""

__version__ = "0.1.0"
