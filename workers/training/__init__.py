"""From samples to versions: select, assemble, train."""
