DROP TABLE IF EXISTS `my_job`;

DROP TABLE IF EXISTS `my_task`;

DELETE FROM `my_installed` WHERE step = '0003';
