"""Commands that prove the arithmetic: `verify` (modes agree) and `replay` (a recorded run to the same bits)."""
