"""How trained versions reach the engines: as adapters beside what serves, or as full weights in its place."""
