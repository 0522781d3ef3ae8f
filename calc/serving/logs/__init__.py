"""Start-up logs of serving engines: what they say, against what is computed for the same plan."""

from calc.serving.logs.comparison import LogAnswer, compared
from calc.serving.logs.reader import LogFacts, read

__all__ = ["LogAnswer", "LogFacts", "compared", "read"]
