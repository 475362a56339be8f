"""The parts of the job config, one noun a module; penstock_trainer.contract.config joins them."""
