"""Questions about the tables: each relation's rows, phrasings to train on, others held out, and the one answer."""

from tiny.relations.relation import Relation, Row
from tiny.relations.sequences import SEQUENCES
from tiny.relations.sums import SUMS
from tiny.relations.words import WORDS
from tiny.relations.world import WORLD

RELATIONS = WORLD + SEQUENCES + WORDS + SUMS

__all__ = ["RELATIONS", "SUMS", "Relation", "Row"]
