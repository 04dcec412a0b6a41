DROP TABLE IF EXISTS `lock_task_timeout`;

DROP TABLE IF EXISTS `lock_task_state`;

DELETE FROM `lock_installed` WHERE step = '0002';
