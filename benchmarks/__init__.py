"""What the probes cost, beside SGLang's and beside plain torch: `python -m benchmarks`."""

import os

# Before torch is loaded, whose profiler else reports on stderr whenever it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
