"""What every job needs: configuration, ranks and their failures, tracking, storage."""
