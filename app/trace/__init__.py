"""Tools over a recorded trace: summary, comparison, replay, other programs' formats. No part of serving."""
