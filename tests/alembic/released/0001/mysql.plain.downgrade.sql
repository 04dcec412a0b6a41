DROP TABLE IF EXISTS `lock_locked_keys`;

DROP TABLE IF EXISTS `lock_installed`;
