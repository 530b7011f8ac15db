"""How many SMs communication needs so that the slower link, not the SMs, is the limit.

The formulas are those that DeepEP 2.1 documents in its source (`get_theoretical_num_sms`, `get_theoretical_num_qps`,
the buffer size hints), written from their description; they reproduce its published SM counts and buffer sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moeloom.plan.choices import Uniform

SM_READ_BYTES_PER_SECOND = 200e9  # DeepEP's assumptions for one SM that moves rows
SM_WRITE_BYTES_PER_SECOND = 50e9
MARGIN = 1.25
MIN_SMS = 4
