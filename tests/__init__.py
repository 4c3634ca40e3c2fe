"""Tests, and the benchmarks beside them."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is loaded
