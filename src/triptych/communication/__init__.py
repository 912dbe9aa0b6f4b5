"""Communication between ranks: which collectives are joined, where they are started, and where they are waited for."""
