"""jaxis inside other systems. Nothing else imports these modules, and each imports its system when it is imported."""
