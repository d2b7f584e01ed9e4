"""Money as a pure domain: deposits, escrow, pending and payable credits, fees, payouts. No clock, no database."""
