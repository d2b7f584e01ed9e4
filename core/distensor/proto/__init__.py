"""The wire format of the control plane. Only `distensor.comm` may import it. `make proto` regenerates the stubs."""
