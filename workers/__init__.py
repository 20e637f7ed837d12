"""Background stages (curate, judge, roll out, assemble, train, evaluate, publish) and the engine supervisor."""
