"""The tables as a MetaData, and one look at all that is there."""
