"""Send each line of finalised reports once to billing systems. The delivery ledger records every delivery."""

from __future__ import annotations
