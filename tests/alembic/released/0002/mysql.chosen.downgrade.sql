DROP TABLE IF EXISTS `my_task_timeout`;

DROP TABLE IF EXISTS `my_task_state`;

DELETE FROM `my_installed` WHERE step = '0002';
